"""One call of a block: its record, plans for it, and the hooks that follow one."""
