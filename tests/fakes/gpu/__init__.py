"""A GPU made of CPU memory that finds what was not waited for: see ../fake_device.py."""
