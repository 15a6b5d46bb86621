"""The tiers of one process: device memory, streams, copies over the link, and kernels."""
