"""One call of a block: what it did, plans for it, and the hooks that follow one."""
