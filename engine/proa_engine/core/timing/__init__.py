"""How long steps take: what the engine learns of it, and decides by it."""
