"""Pictures: an explorer in, a scene out; and the scene as a still picture."""
