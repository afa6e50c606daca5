"""From a recorded dataset to batches: rows, images, prompts, statistics, samples, loader."""
