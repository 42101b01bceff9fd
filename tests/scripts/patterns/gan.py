"""Two wrapped networks that train each other, with requires_grad switched off and on."""

import torch
from torch import nn

torch.manual_seed(8)
netG = nn.DataParallel(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))).cuda()
netD = nn.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))).cuda()
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-2, betas=(0.5, 0.999))
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-2, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
history = []
for _ in range(3):
    for p in netD.parameters():
        p.requires_grad = True
    real = torch.randn(10, 4).cuda()
    fake = netG(torch.randn(10, 3, device="cuda"))
    netD.zero_grad()
    errD_real = criterion(netD(real).view(-1), torch.ones(10).cuda())
    errD_real.backward()
    errD_fake = criterion(netD(fake.detach()).view(-1), torch.zeros(10).cuda())
    errD_fake.backward()
    optimizerD.step()

    for p in netD.parameters():
        p.requires_grad = False
    netG.zero_grad()
    errG = criterion(netD(fake).view(-1), torch.ones(10).cuda())
    errG.backward()
    optimizerG.step()
    history.append([errD_real.item(), errD_fake.item(), errG.item()])
RESULT = {"history": history, "G": netG.state_dict(), "D": netD.state_dict()}
