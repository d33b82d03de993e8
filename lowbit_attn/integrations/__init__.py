"""Adapters to other people's frameworks; each subpackage imports its framework, this one imports nothing."""
