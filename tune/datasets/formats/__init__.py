"""What a row of a dataset says: a conversation, a text, or tokens, and which part of it is to be learned."""
