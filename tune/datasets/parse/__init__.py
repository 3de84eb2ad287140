"""Step 2: `parse(row, ...)` gives what a row says: a conversation, a text or tokens, or several answers to compare."""
