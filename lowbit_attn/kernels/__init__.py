"""Fast implementations, one family of architectures per folder; each kernel equals a named function of `reference`."""
