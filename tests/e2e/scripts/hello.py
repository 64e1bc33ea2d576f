print("hello from a worker")
