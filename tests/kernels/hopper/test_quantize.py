"""The quantizer's host side and its integer arithmetic, on the CPU: bounds, modes, strides and what is refused."""

