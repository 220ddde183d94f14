"""Columns of the table that says how each request samples: a row a slot, float64, which holds 32-bit words exactly."""

TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, TOP_K, KEY_LO, KEY_HI, NUM_PROMPT = range(10)
NUM_COLUMNS = 10

# A temperature below this is greedy: dividing by it says nothing more and overflows.
MIN_TEMPERATURE = 1e-5
