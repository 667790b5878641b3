/* A replica that computes nothing: answers at once, or streams tokens at a fixed pace.

   replica PORTS TOKENS INTERVAL_MS: listens on PORTS ports of 127.0.0.1 that the system chooses and
   prints them. One thread; every stream has the same interval, so the order in which their tokens
   are due is the order of a queue. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EVENT "data: {\"id\":\"1\",\"object\":\"text_completion\",\"model\":\"bench\"," \
              "\"choices\":[{\"index\":0,\"text\":\" .\",\"finish_reason\":null}]}\n\n"
#define STREAM_END "data: [DONE]\n\n"
#define USAGE "\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"total_tokens\":10," \
              "\"prompt_tokens_details\":{\"cached_tokens\":0}}"

struct conn {
    int fd, is_listener, is_streaming, is_queued;
    int tokens_left;
    long long due_us;
    size_t length, room, out_length, out_room, out_sent;
    char *in, *out;
    struct conn *next;
};

static int loop, tokens, interval_ms;
static struct conn *queue_head, *queue_tail, *dead;

static long long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

static void *grown(char *data, size_t *room, size_t need) {
    if (need <= *room) return data;
    while (*room < need) *room = *room ? *room * 2 : 4096;
    data = realloc(data, *room);
    if (!data) abort();
    return data;
}

static void end(struct conn *c) {
    if (c->fd < 0) return;
    close(c->fd);
    c->fd = -1;
    if (!c->is_queued) {
        c->next = dead;
        dead = c;
    }
}

static void flush(struct conn *c) {
    while (c->out_sent < c->out_length) {
        ssize_t n = send(c->fd, c->out + c->out_sent, c->out_length - c->out_sent, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno != EAGAIN && errno != EINTR) end(c);
            return; /* EPOLLOUT, which is always asked for, brings us back */
        }
        c->out_sent += n;
    }
    c->out_sent = c->out_length = 0;
}

static void put(struct conn *c, const char *data, size_t length) {
    c->out = grown(c->out, &c->out_room, c->out_length + length);
    memcpy(c->out + c->out_length, data, length);
    c->out_length += length;
}

static void put_chunk(struct conn *c, const char *data, size_t length) {
    char head[32];
    put(c, head, snprintf(head, sizeof head, "%zx\r\n", length));
    put(c, data, length);
    put(c, "\r\n", 2);
}

static void put_json(struct conn *c, const char *body) {
    char head[160];
    put(c, head, snprintf(head, sizeof head,
                          "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                          "Content-Length: %zu\r\n\r\n", strlen(body)));
    put(c, body, strlen(body));
}

static void enqueue(struct conn *c, long long due_us) {
    c->due_us = due_us;
    c->is_queued = 1;
    c->next = NULL;
    if (queue_tail) queue_tail->next = c; else queue_head = c;
    queue_tail = c;
}

static void respond(struct conn *c, const char *head, size_t head_length) {
    const char *body = head + head_length;
    size_t length = c->length - head_length;
    if (!strncmp(head, "GET /v1/models", 14))
        put_json(c, "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\","
                    "\"max_model_len\":1000000}]}");
    else if (!strncmp(head, "GET ", 4))
        put_json(c, "{\"model_path\":\"bench\",\"is_generation\":true}");
    else if (!strncmp(head, "POST /tokenize", 14))
        put_json(c, "{\"count\":1,\"max_model_len\":1000000,\"tokens\":[1]}");
    else if (memmem(body, length, "\"stream\":true", 13) || memmem(body, length, "\"stream\": true", 14)) {
        const char *start = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                            "Transfer-Encoding: chunked\r\n\r\n";
        put(c, start, strlen(start));
        c->is_streaming = 1;
        c->tokens_left = tokens - 1;
        put_chunk(c, EVENT, strlen(EVENT));
        enqueue(c, now_us() + interval_ms * 1000LL);
    } else if (memmem(head, head_length, "/chat/", 6))
        put_json(c, "{\"id\":\"1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"bench\","
                    "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\".\"},"
                    "\"finish_reason\":\"length\"}]," USAGE "}");
    else
        put_json(c, "{\"id\":\"1\",\"object\":\"text_completion\",\"created\":1,\"model\":\"bench\","
                    "\"choices\":[{\"index\":0,\"text\":\".\",\"finish_reason\":\"length\"}]," USAGE "}");
    c->length = 0;
    flush(c);
}

static void take(struct conn *c) {
    char *end_of_head;
    size_t head_length, need;
    const char *field;
    if (!c->length || c->is_streaming) return;
    end_of_head = memmem(c->in, c->length, "\r\n\r\n", 4);
    if (!end_of_head) return;
    head_length = end_of_head + 4 - c->in;
    *end_of_head = 0;
    field = strcasestr(c->in, "\r\ncontent-length:");
    need = field ? strtoul(field + 17, NULL, 10) : 0;
    if (!field && strcasestr(c->in, "\r\ntransfer-encoding:")) {
        *end_of_head = '\r';
        if (memcmp(c->in + c->length - 5, "0\r\n\r\n", 5)) return;
    } else {
        *end_of_head = '\r';
        if (c->length < head_length + need) return;
    }
    respond(c, c->in, head_length);
}

static void receive(struct conn *c) {
    for (;;) {
        ssize_t n;
        c->in = grown(c->in, &c->room, c->length + 65536);
        n = recv(c->fd, c->in + c->length, c->room - c->length, 0);
        if (n > 0) {
            c->length += n;
            take(c);
            if (c->fd < 0) return;
        } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
            return;
        } else {
            end(c);
            return;
        }
    }
}

static void watch(struct conn *c, int events) {
    struct epoll_event e = {.events = events, .data.ptr = c};
    if (epoll_ctl(loop, EPOLL_CTL_ADD, c->fd, &e)) abort();
}

static void admit(struct conn *listener) {
    int fd, on = 1;
    while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct conn *c = calloc(1, sizeof *c);
        if (!c) abort();
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        c->fd = fd;
        watch(c, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    }
}

static void send_tokens(void) {
    long long now = now_us();
    while (queue_head && queue_head->due_us <= now) {
        struct conn *c = queue_head;
        queue_head = c->next;
        if (!queue_head) queue_tail = NULL;
        c->is_queued = 0;
        if (c->fd < 0) {
            c->next = dead;
            dead = c;
            continue;
        }
        if (c->tokens_left-- > 0) {
            put_chunk(c, EVENT, strlen(EVENT));
            enqueue(c, c->due_us + interval_ms * 1000LL);
        } else {
            put_chunk(c, STREAM_END, strlen(STREAM_END));
            put(c, "0\r\n\r\n", 5);
            c->is_streaming = 0;
        }
        flush(c);
        if (c->fd >= 0) take(c); /* the next request, if it came meanwhile */
    }
}

static int listen_anywhere(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    struct conn *c = calloc(1, sizeof *c);
    if (!c || (c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)) < 0) abort();
    if (bind(c->fd, (void *)&a, size) || listen(c->fd, 4096)) abort();
    getsockname(c->fd, (void *)&a, &size);
    c->is_listener = 1;
    watch(c, EPOLLIN);
    return ntohs(a.sin_port);
}

int main(int argc, char **argv) {
    struct rlimit files;
    struct epoll_event found[512];
    if (argc != 4) return 2;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    loop = epoll_create1(0);
    tokens = atoi(argv[2]);
    interval_ms = atoi(argv[3]);
    for (int i = 0; i < atoi(argv[1]); i++) printf("%s%d", i ? " " : "", listen_anywhere());
    printf("\n");
    fflush(stdout);
    for (;;) {
        long long wait_us = queue_head ? queue_head->due_us - now_us() : 1000000;
        int count = epoll_wait(loop, found, 512, wait_us <= 0 ? 0 : (int)((wait_us + 999) / 1000));
        for (int i = 0; i < count; i++) {
            struct conn *c = found[i].data.ptr;
            if (c->is_listener) admit(c);
            else if (c->fd >= 0) {
                if (found[i].events & EPOLLOUT) flush(c);
                if (c->fd >= 0 && found[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) receive(c);
            }
        }
        send_tokens();
        while (dead) {
            struct conn *c = dead;
            dead = c->next;
            free(c->in);
            free(c->out);
            free(c);
        }
    }
}
