"""What all APIs share: a request from its parsed body to the last byte of its response."""
