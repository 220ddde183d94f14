"""Tools of a request: those that the model may call, those that are left out, and their description for a template."""
