"""Measurements of the reference beside the papers' published numbers: one module per table."""
