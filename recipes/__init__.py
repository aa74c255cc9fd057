"""Complete, copyable examples; each uses the front door of mmattn only."""
