"""``tiering demo``: trains a small GPT with its state on NVMe, and checks that placement does not change the result.

    settings.py  sizes and hyperparameters      model.py, corpus.py  a byte-level GPT, and text for it
    worker.py    one process that trains: on NVMe, in memory, or with a plain PyTorch loop
    children.py  starts and stops workers and the sidecar
    run.py       runs the three workers in sequence      comparison.py  compares their results

It uses only the public API, ``import tiering``.
"""
