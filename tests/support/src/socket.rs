//! The server's end of a connection, as the kernel of this machine sees it.
//!
//! `/proc/net/tcp` has the same, with a line for each connection that was closed within the last minute. After a thousand tests, that is megabytes.

use std::io;
use std::net::SocketAddrV4;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};

/// `SOCK_DIAG_BY_FAMILY`, of `linux/sock_diag.h`.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST`, of `linux/netlink.h`.
const REQUEST: u16 = 1;
/// A TCP state, of the kernel's `net/tcp_states.h`.
const ESTABLISHED: u8 = 1;
const LISTEN: u8 = 10;

/// One end of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Socket {
    state: u8,
    /// The bytes that have arrived and were not read.
    unread: u32,
}

impl Socket {
    /// The end at `here` of the connection to `there`, or `None` if it is closed.
    pub fn find(here: SocketAddrV4, there: SocketAddrV4) -> io::Result<Option<Self>> {
        let kernel =
            socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
        send(&kernel, &request(here, there), SendFlags::empty())?;
        let mut reply = [0; 1024];
        let (length, _) = recv(&kernel, &mut reply, RecvFlags::empty())?;
        // A `struct inet_diag_msg` of `linux/inet_diag.h` behind the header, or the error that there is no such socket.
        let is_found = length >= 76 && reply[4..6] == BY_FAMILY.to_ne_bytes();
        let found = is_found.then(|| Self {
            state: reply[17],
            unread: u32::from_ne_bytes([reply[72], reply[73], reply[74], reply[75]]),
        });
        // Without a connection, the kernel finds the socket that listens for one.
        Ok(found.filter(|socket| socket.state != LISTEN))
    }

    /// Whether the other end has not closed it.
    pub fn is_established(self) -> bool {
        self.state == ESTABLISHED
    }
}

/// A `struct nlmsghdr` and a `struct inet_diag_req_v2` that names one socket.
fn request(here: SocketAddrV4, there: SocketAddrV4) -> Vec<u8> {
    const LENGTH: u32 = 72;
    const IPV4: u8 = 2;
    const TCP: u8 = 6;
    const NO_COOKIE: [u8; 8] = [0xff; 8];
    let mut bytes = Vec::with_capacity(LENGTH as usize);
    bytes.extend(LENGTH.to_ne_bytes());
    bytes.extend(BY_FAMILY.to_ne_bytes());
    bytes.extend(REQUEST.to_ne_bytes());
    bytes.extend([0; 8]); // sequence number, sender
    bytes.extend([IPV4, TCP, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes()); // in any state
    bytes.extend(here.port().to_be_bytes());
    bytes.extend(there.port().to_be_bytes());
    for end in [here, there] {
        bytes.extend(end.ip().octets());
        bytes.extend([0; 12]); // an IPv6 address is longer
    }
    bytes.extend([0; 4]); // any interface
    bytes.extend(NO_COOKIE);
    bytes
}
