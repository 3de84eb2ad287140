"""Step 1: `read(path)` gives the rows of files, of the Hugging Face hub or of a function, each with its place."""
