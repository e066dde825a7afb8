"""Stored responses and conversations: a database by owner, background responses, and their routes."""
