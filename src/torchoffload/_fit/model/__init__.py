"""A fitted model: the public function, its handle, and what goes on from step to step."""
