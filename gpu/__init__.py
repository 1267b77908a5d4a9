"""The compute plane: executors, models, kernels and checkpoint loading."""
