"""Views: controls and a picture bound to an explorer."""
