"""Pictures: plain data in, matplotlib figures out."""
