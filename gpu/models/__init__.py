"""Models: a lean decoder for the Llama family, and an adapter for what transformers knows."""
