"""Step 1: `read(path)` yields rows of files, of the Hugging Face hub or of a function, each with its place."""
