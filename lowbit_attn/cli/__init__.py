"""The command line, `lowbit-attn`: one module per command."""
