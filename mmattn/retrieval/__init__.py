"""Retrieval: what is looked up for a query, and how it becomes memory."""
