"""A finished run merged, described, converted, published; every result is checked before it is kept."""
