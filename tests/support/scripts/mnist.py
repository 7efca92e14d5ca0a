"""Digits with a convolutional network, in the form of PyTorch's MNIST example. Plain torch.

Arguments: file for the trained weights. Without MNIST's files the images are random, with labels by a rule.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.fc1 = nn.Linear(32, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        images = functional.relu(self.conv1(images))
        images = functional.relu(self.conv2(images))
        images = torch.flatten(functional.max_pool2d(images, 2), 1)
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(images))), dim=1)


def train(model: nn.Module, train_loader: DataLoader, optimizer: optim.Optimizer, epoch: int) -> None:
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        output = model(data)
        loss = functional.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % 4 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}]\tLoss: {loss.item():.6f}")


def test(model: nn.Module, test_loader: DataLoader) -> None:
    model.eval()
    test_loss = 0.0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += functional.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    print(f"Test set: Average loss: {test_loss / len(test_loader.dataset):.4f}, Accuracy: {correct}")


def main() -> None:
    torch.manual_seed(1)
    images = torch.rand(320, 1, 8, 8)
    dataset = TensorDataset(images, (images.sum((1, 2, 3)) * 2).long() % 10)
    train_loader = DataLoader(dataset, batch_size=64)
    test_loader = DataLoader(dataset, batch_size=100)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        train(model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
