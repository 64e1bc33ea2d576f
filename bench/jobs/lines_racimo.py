import torch
from torch.nn.functional import cross_entropy
import racimo


def train(config):
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = x[:, :4].argmax(dim=1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    for epoch in racimo.current_run().rounds(9, {"model": model, "optimizer": optimizer}):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        racimo.current_run().report(loss=loss)


if __name__ == "__main__":
    racimo.Client().tune(train, space={"lr": "log 0.001..1.0"}, metric="loss", rounds=9, trials=20)
