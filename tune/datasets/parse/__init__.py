"""Step 2: `parse(row, ...)` returns a row's content: a conversation, text or tokens, or several answers to compare."""
