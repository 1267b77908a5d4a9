"""The parts of ``benchmarks.gpu_check``: what the CUDA backend computes, and how fast, on the GPU at hand."""
