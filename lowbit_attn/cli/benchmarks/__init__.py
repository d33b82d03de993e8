"""Speed and error of attention and quantizers beside other implementations: one module per step of a measurement."""
