"""bench_lora.py: adapters over a frozen base on NVMe, and products with a quantised base.

``shape.py`` has the models and their files, ``worker.py`` the processes that train, ``training.py`` their comparison,
and ``products.py`` the products.
"""
