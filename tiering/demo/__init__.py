"""``tiering demo``: trains a small GPT with its state on NVMe, and checks that placement changed nothing.

    settings.py  what is trained, and how      model.py, corpus.py  a byte-level GPT, and text for it
    worker.py    one process, one way to train: NVMe, memory, or a plain PyTorch loop
    children.py  those processes seen from outside, and the sidecar
    run.py       runs the three ways after each other      report.py  what they came to

Like any user, it reaches the engine through ``import tiering`` alone.
"""
