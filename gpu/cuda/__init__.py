"""The CUDA plane: kernels in Triton, and what runs them."""
