"""Internal: swap space on NVMe, the pinned arena in host memory, and asynchronous I/O. No torch."""
