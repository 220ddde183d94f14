"""Where models come from: folders, the hub, object stores, and the caches of what was downloaded."""
