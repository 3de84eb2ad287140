"""Rows from files, from the Hugging Face hub and from functions, each with its place for messages."""
