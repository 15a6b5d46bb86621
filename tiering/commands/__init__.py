"""Internal: the subcommands of ``tiering``, one file each."""
