import torch
from torch.nn.functional import cross_entropy


def train(config):
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    y = x[:, :4].argmax(dim=1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    for epoch in range(1, 10):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        print("loss", loss.item())


if __name__ == "__main__":
    train({"lr": 0.1})
