"""Triton kernels of the CUDA plane, each with a launcher that checks its arguments, and their definitions in torch."""
