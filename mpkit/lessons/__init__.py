"""Lessons by topic: `<topic>.py` holds numbers and views, `<topic>.toml` the words."""
