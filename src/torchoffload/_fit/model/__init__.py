"""A fitted model: the public function, its handle, and the work from step to step."""
