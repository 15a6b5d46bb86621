from setuptools import setup

# Everything else is in pyproject.toml; cffi still registers its builders through this keyword only.
setup(cffi_modules=["aio_csrc/build_aio.py:ffibuilder", "optim_cpu/csrc/build_optim.py:ffibuilder"])
