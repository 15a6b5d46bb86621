"""The subcommands of ``tiering``, one file each."""
