"""Internal: the checks of ``tiering doctor``, each with a remedy. No torch."""
