"""tierbench compare: compares results, or alternates the load with fio."""
