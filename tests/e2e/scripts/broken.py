def train(config)
    return 1
