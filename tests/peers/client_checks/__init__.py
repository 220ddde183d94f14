"""Checks with one client library each. A check is a function of the gateway's URL and the model's name that raises."""
