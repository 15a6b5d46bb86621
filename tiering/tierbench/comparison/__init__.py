"""tierbench compare: results beside each other, and the load beside fio."""
