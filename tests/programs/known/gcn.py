# %%
"""pygcn: a graph network on the whole graph at once, a sparse adjacency, masks of nodes, weights drawn by hand."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.modules.module import Module
from torch.nn.parameter import Parameter

torch.manual_seed(42)
nodes = 16
dense = (torch.rand(nodes, nodes) < 0.2).float()
dense = ((dense + dense.t() + torch.eye(nodes)) > 0).float()
adj = (dense / dense.sum(1, keepdim=True)).to_sparse()
features, labels = torch.randn(nodes, 5), torch.arange(nodes) % 3
idx_train, idx_val, idx_test = torch.arange(8), torch.arange(8, 12), torch.arange(12, 16)


# %%
class GraphConvolution(Module):
    def __init__(self, in_features, out_features, bias=True):
        super(GraphConvolution, self).__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = Parameter(torch.FloatTensor(in_features, out_features))
        if bias:
            self.bias = Parameter(torch.FloatTensor(out_features))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self):
        stdv = 1.0 / math.sqrt(self.weight.size(1))
        self.weight.data.uniform_(-stdv, stdv)
        if self.bias is not None:
            self.bias.data.uniform_(-stdv, stdv)

    def forward(self, input, adj):
        support = torch.mm(input, self.weight)
        output = torch.spmm(adj, support)
        return output + self.bias if self.bias is not None else output


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass):
        super(GCN, self).__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        return F.log_softmax(self.gc2(x, adj), dim=1)


def accuracy(output, labels):
    preds = output.max(1)[1].type_as(labels)
    return preds.eq(labels).double().sum() / len(labels)


model = GCN(nfeat=5, nhid=6, nclass=3)
optimizer = optim.Adam(model.parameters(), lr=0.02, weight_decay=5e-4, eps=1e-4)
curve = []


def train(epoch):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss_train = F.nll_loss(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()
    model.eval()
    output = model(features, adj)
    curve.append((loss_train.item(), F.nll_loss(output[idx_val], labels[idx_val]).item()))


def test():
    model.eval()
    output = model(features, adj)
    return F.nll_loss(output[idx_test], labels[idx_test]).item(), accuracy(output[idx_test], labels[idx_test]).item()


# %% distributed
for epoch in range(4):
    train(epoch)
tested = test()

# %%
result = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "curve": curve,
    "tested": tested,
    "tested here": test(),
}
